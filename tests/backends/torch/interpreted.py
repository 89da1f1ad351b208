"""A pytest plugin (`-p interpreted`, this folder in PYTHONPATH): what runs in Triton's interpreter
does so as interpreter.py patches it. TRITON_INTERPRET=1 must stand in the environment."""

import interpreter

interpreter.install()
