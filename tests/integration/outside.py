"""A process outside any graph: joins Ray, attaches to TransferQueue, writes one field, prints when.

python outside.py ADDRESS PARTITION ROW FIELD VALUE...
"""

import sys
import time

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

address, partition, row, field, *values = sys.argv[1:]
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
tq.init()
score = torch.tensor([[float(value) for value in values]])
before_s = time.monotonic()
tq.kv_batch_put(keys=[row], partition_id=partition, fields=TensorDict({field: score}, batch_size=1))
print(before_s, time.monotonic())
