"""A process outside any graph: reads a text of a group, writes its score as a TensorDict, and prints both and when.

python outside.py RUN_DIR GROUP VALUE...
"""

import sys
import time

import torch
from tensordict import TensorDict

from pipeline.data_plane.outside import OutsideProcess

run_dir, group, *values = sys.argv[1:]
score = torch.tensor([float(value) for value in values])
with OutsideProcess(run_dir) as process:
    texts = process.read(int(group), "shout")["shout"]
    before_s = time.monotonic()
    process.write(int(group), TensorDict({"score": score}, batch_size=[len(score)]))
print(",".join(texts), before_s, time.monotonic())
