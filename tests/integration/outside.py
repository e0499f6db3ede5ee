"""A process outside any graph: reads a text and the marks of a group, writes its scores and grades as a TensorDict, and
prints what it read and when. It first tries grades with the right total and the wrong lengths, and prints the error.

python outside.py RUN_DIR GROUP VALUE...
"""

import sys
import time

import torch
from tensordict import TensorDict

from pipeline.data_plane.outside import OutsideProcess
from pipeline.declare.columns import Ragged
from pipeline.errors import DataPlaneError

run_dir, group, *values = sys.argv[1:]
score = torch.tensor([float(value) for value in values])
with OutsideProcess(run_dir) as process:
    while True:  # the driver shares a group's handle within a second
        try:
            read = process.read(int(group), "shout", "marks")
            break
        except DataPlaneError as error:
            if "up to a second" not in str(error):
                raise
            time.sleep(0.1)
    marks = read["marks"]
    try:
        process.write(int(group), {"score": score, "grades": Ragged(marks.values().float(), (2, 1))})
    except DataPlaneError as error:
        refused = str(error).replace("\n", " ")
    before_s = time.monotonic()
    process.write(int(group), TensorDict({"score": score, "grades": marks.float()}, batch_size=[len(score)]))
print(",".join(read["shout"]), marks.values().tolist(), before_s, time.monotonic(), refused, sep="|")
