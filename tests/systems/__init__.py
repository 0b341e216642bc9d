"""Linear systems below neula.solve."""
