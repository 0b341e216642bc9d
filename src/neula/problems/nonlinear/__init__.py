"""Non-linear least squares: fits of models, with bounds, robust losses and batches."""
