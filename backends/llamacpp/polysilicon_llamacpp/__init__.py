"""GGUF models of any architecture that llama.cpp knows, as a whole-model executor."""
