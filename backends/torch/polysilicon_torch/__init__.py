"""What the cuda and rocm backends share: a torch device and Triton kernels."""
