"""What every local method stands on: a model, its keys and values, packed forwards, and the step loop."""

import sys
import warnings
from importlib import import_module

if "ipykernel.zmqshell" in sys.modules:
    # transformers' bars are tqdm's, which in Jupyter warns on its first import where widgets are not installed: bars
    # are text then. Only that import is kept quiet.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        import_module("tqdm.auto")
