"""The real backend: kernels, transport, model and instances on hardware. Needs the extra `infsim[real]`."""
