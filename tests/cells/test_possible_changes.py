"""Names that a cell may change, as cells of notebooks change them."""

from __future__ import annotations

import ast

import pytest

from nbdist.cells.possible_changes import PossibleChanges

BEFORE = """
import numpy as np, jax, tensorflow as tf, matplotlib.pyplot as plt
from jax import config, random
from tensorflow.keras import mixed_precision
from mylib import consts
rng = np.random.default_rng(7)
base = build()
model = make(base)
opt = Adam()
model.compile(opt, "mse")
emb = model.get_layer("emb")
alias = table
cfg = hp
batches = stream()
def show(x, labels):
    plt.imshow(x[0])
    plt.title(labels[0])
def accuracy(model, x, y):
    pred = model.predict(x)
    return np.mean(pred == y)
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss
def train_one_epoch():
    return [train_step(x, y) for x, y in ds]
def fill(array, value):
    array[:] = value
    return value
def tick():
    global step
    step += 1
def add_to_class(cls):
    def wrapper(f):
        setattr(cls, f.__name__, f)
    return wrapper
registry = {}
def register(f):
    registry[f.__name__] = f
    return f
@jax.jit
def loss_of(params, x):
    return x @ params
class Trainer:
    def scale(self, by):
        self.rate = by
        log.append(by)
trainer = Trainer()
"""


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("for layer in base.layers[:1]:\n    layer.trainable = False", {"base"}),
        ("[setattr(l, 'trainable', False) for l in base.layers]", {"base"}),
        ("first = train_one_epoch()", {"model", "opt"}),
        ("for epoch in range(2):\n    print(epoch, train_one_epoch())", {"model", "opt"}),
        ("opt.learning_rate = 1e-4", {"opt", "model"}),
        ("emb.set_weights([w])", {"emb", "model"}),
        ("alias *= 2", {"alias", "table"}),
        ("cfg.lr = 0.02", {"cfg", "hp"}),
        ("xb, yb = next(batches)", {"batches"}),
        ("sample = rng.choice(10, 5)", {"rng"}),
        ("rng.shuffle(order)", {"rng", "order"}),
        ('config.update("jax_enable_x64", True)', {"config"}),
        ('mixed_precision.set_global_policy("mixed_bfloat16")', {"mixed_precision"}),
        ("consts.WIDTH = 9", {"consts"}),
        ("removed = scale.setdefault('z', 2.0)", {"scale"}),
        ("out = model(x, training=True)", {"model", "opt"}),
        ("@add_to_class(Trainer)\ndef scale(self):\n    return 1", {"Trainer"}),
        ("@register\ndef f(): pass", {"registry"}),
        ("v = fill(head, 0)", {"head"}),
        ("tick()", {"step"}),
        ("first, *rest = (log.append(i) or i for i in range(3))", {"log"}),
        ("trainer.scale(2)", {"trainer", "log"}),
        ("np.random.shuffle(order)", {"order"}),
    ],
)
def test_changes_are_found(cell: str, names: set[str]) -> None:
    trees = [ast.parse(BEFORE), ast.parse(cell)]
    changes = PossibleChanges(trees)
    assert names <= changes.with_aliases(changes.of_cell(trees[1]))


MODULE = """
import numpy as np
rates = [1.0]
def train(net, data, epochs=1):
    np.random.seed(0)
    rates.append(epochs)
    return _fit(net, data)
def _fit(net, data):
    return net.fit(data)
def accuracy(net, data):
    return net.predict(data).mean()
class Trainer:
    def __init__(self, net):
        self.net = net
    def run(self):
        self.net.fit(1)
"""


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("from helpers import train\nhistory = train(model, data)", {"model"}),
        ("from helpers import train as learn\nhistory = learn(model, data)", {"model"}),
        ("import helpers\nhistory = helpers.train(net=model, data=data)", {"model"}),
        ("import helpers as h\nlosses = [h.train(model, data) for _ in range(2)]", {"model"}),
        ("from helpers import Trainer\nt = Trainer(model)\nh = t.run()", {"model", "t"}),
        ("from helpers import accuracy\nprint(accuracy(model, data))", set()),
    ],
)
def test_functions_of_own_modules_are_followed(cell: str, names: set[str]) -> None:
    tree = ast.parse(cell)
    changes = PossibleChanges([tree], {"helpers": [ast.parse(MODULE)]})
    found = changes.with_aliases(changes.of_cell(tree))
    assert names <= found
    assert not found & {"data", "np", "rates"}


@pytest.mark.parametrize(
    "cell",
    [
        "model.summary()",
        "preds = model.predict(x_test)\nprint(preds[:3], len(preds))",
        "plt.figure()\nfor i in range(3):\n    show(x_train, y_train)",
        "for images, labels in train_ds.take(1):\n    plt.imshow(images[0].numpy())",
        "print(accuracy(model, x_test, y_test))",
        "loss = loss_of(params, x)",
        "y = model(x)",
        "key, sub = random.split(key)",
        "x_small = x_train.reshape(-1, 2).mean(axis=0)",
        "lines = [line.strip() for line in text.split()]",
        "df.head()",
    ],
)
def test_cells_that_look_change_nothing(cell: str) -> None:
    trees = [ast.parse(BEFORE), ast.parse(cell)]
    changes = PossibleChanges(trees)
    changed = changes.with_aliases(changes.of_cell(trees[1]))
    used = {"model", "opt", "x_train", "y_train", "x_test", "train_ds", "params", "x", "df", "text"}
    assert not changed & used
