"""The functions as operators of torch, and the functions under ``torch.compile``.

A public function whose numbers cannot be read (:func:`neula.pipeline.operators.is_traced`) calls its
operator: functions here that begin with ``traced`` have its parameters, and return None where there is no
operator for what is asked. All operators are there once ``neula.ops`` has been named.
"""
