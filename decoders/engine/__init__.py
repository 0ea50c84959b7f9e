"""The parts that all local methods share: the model, its key-value cache, packed forwards, and the step loop."""

import sys
import warnings
from importlib import import_module

if "ipykernel.zmqshell" in sys.modules:
    # transformers imports tqdm, which warns once in Jupyter if ipywidgets is missing and then shows text bars.
    # Silence that import only.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        import_module("tqdm.auto")
