"""The CPU backend of polysilicon: native kernels, chosen for the processor when it starts."""
