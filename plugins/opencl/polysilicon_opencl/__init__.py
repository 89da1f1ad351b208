"""polysilicon on OpenCL: a backend built only on the public contract."""
