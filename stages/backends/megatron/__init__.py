"""The megatron backend: Megatron-core, to score and to train on many ranks.

Megatron-core 0.16 warns, as it is imported, of each optional package that is absent, and while it runs of what newer
versions of torch do otherwise. None of it concerns the user, so these warnings, and no others, are not shown.
"""

import warnings

warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning)
