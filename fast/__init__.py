"""The engine under test: GLM-5.3-Flash in torch, with CUDA kernels compiled through CuPy."""
