"""What every local method stands on: a model, its keys and values, packed forwards, and the step loop."""

import warnings

# transformers has tqdm look for Jupyter's widgets, and it warns where they are not installed: bars are text then.
warnings.filterwarnings("ignore", "IProgress not found")
