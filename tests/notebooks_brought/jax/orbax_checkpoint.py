# framework: jax
# compare: losses; resumed_losses; ckpt["params"]; restored["params"]; same; latest

# %% [markdown]
# # Save and restore with Orbax
#
# Train for a while, save, restore into a fresh template, go on with the training.

# %%
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

# %%
ckpt_dir = pathlib.Path(tempfile.mkdtemp())

rng = np.random.default_rng(9)
x = rng.normal(size=(128, 4)).astype(np.float32)
y = (x @ np.array([[1.0], [2.0], [3.0], [-1.0]])).astype(np.float32)


# %%
def init_params(seed):
    key = jax.random.key(seed)
    return {"kernel": 0.1 * jax.random.normal(key, (4, 1)), "bias": jnp.zeros((1,))}


@jax.jit
def loss_fn(params, x, y):
    return jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)


tx = optax.adam(0.05)


@jax.jit
def step(ckpt, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(ckpt["params"], x, y)
    updates, opt_state = tx.update(grads, ckpt["opt_state"])
    params = optax.apply_updates(ckpt["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": ckpt["step"] + 1}, loss


# %% First part of the training
params = init_params(0)
ckpt = {"params": params, "opt_state": tx.init(params), "step": 0}
losses = []
for i in range(0, 128, 16):
    ckpt, loss = step(ckpt, x[i : i + 16], y[i : i + 16])
    losses.append(float(loss))
print("after", ckpt["step"], "steps:", losses[-1])

# %% Save
checkpointer = ocp.StandardCheckpointer()
checkpointer.save(ckpt_dir / "state", ckpt)
checkpointer.wait_until_finished()
print(sorted(p.name for p in ckpt_dir.iterdir()))

# %% Restore
fresh = init_params(1)
template = {"params": fresh, "opt_state": tx.init(fresh), "step": jnp.array(0)}
abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
restored = checkpointer.restore(ckpt_dir / "state", abstract)
same = jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ckpt, restored))
print("restored equals saved:", same)

# %% Go on from the restored state, with a manager that keeps the two newest checkpoints
options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=4)
resumed_losses = []
with ocp.CheckpointManager(ckpt_dir / "run", options=options) as manager:
    for i in range(0, 128, 16):
        restored, loss = step(restored, x[i : i + 16], y[i : i + 16])
        resumed_losses.append(float(loss))
        manager.save(int(restored["step"]), args=ocp.args.StandardSave(restored))
    manager.wait_until_finished()
    latest = manager.latest_step()
    print("kept:", manager.all_steps(), "latest:", latest)
    restored = manager.restore(latest, args=ocp.args.StandardRestore(abstract))

# %%
print("loss of the restored parameters:", loss_fn(restored["params"], x, y))
