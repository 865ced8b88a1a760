"""One model's layers over several machines."""
