"""Random command lines, files and shells, and what must hold whatever they say: ``make fuzz N=10000``."""
