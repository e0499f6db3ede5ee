"""The megatron backend: scores and trains on many ranks with Megatron-core.

Megatron-core 0.16 warns at import about each missing optional package, and at run time about what newer torch versions
deprecate. None of it concerns the user, so these warnings, and no others, are filtered.
"""

import warnings

warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning)
