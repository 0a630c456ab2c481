"""A model that FSDP2 divides, with Trackbed's data and checkpoints: `torchrun --nproc-per-node 2 fsdp2.py`.

It is made on the meta device, saves every tenth step, and goes on where it was, on any number of ranks.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import trackbed

STEPS, FOLDER = 30, "checkpoints-fsdp2"

dist.init_process_group("gloo")  # on GPUs "nccl", after torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(1)
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Embedding(2048, 32), torch.nn.Linear(32, 2048))
for layer in model:
    fully_shard(layer)
fully_shard(model)
model.to_empty(device="cpu")  # or "cuda"
for layer in model:
    layer.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
loader = trackbed.BatchLoader(trackbed.open_blend("blend.toml").train, batch_size=8)
checkpointer = trackbed.Checkpointer(FOLDER, keep_last=3)
step, state = 0, checkpointer.load_sharded_state(model, optimizer)  # what else was saved last, or None
if state is not None:
    step = state["step"]
    schedule.load_state_dict(state["schedule"])
    loader.load_state_dict(state["loader"])
    trackbed.restore_random_states(state["random"])
for batch in loader:
    loss = cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    step += 1
    if step % 10 == 0:
        more = {"step": step, "schedule": schedule.state_dict(), "loader": loader.state_dict()}
        more["random"] = trackbed.random_states()
        checkpointer.save(step, {**trackbed.sharded_state(model, optimizer), **more})  # while training goes on
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if step >= STEPS:
        break
checkpointer.close()
dist.destroy_process_group()
