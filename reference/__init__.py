"""The oracle: GLM-5.3-Flash in NumPy. Slow, short and right to the bit on any CPU."""
