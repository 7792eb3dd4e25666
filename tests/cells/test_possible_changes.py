"""Names that a cell may change, as cells of notebooks change them."""

from __future__ import annotations

import ast

import pytest

from nbdist.cells.possible_changes import PossibleChanges


def changed_by(*cells: str) -> set[str]:
    """Return the names that the last of some cells may change, with their other names."""
    trees = [*map(ast.parse, cells)]
    changes = PossibleChanges(trees)
    return changes.with_aliases(changes.of_cell(trees[-1]))


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
    assert names <= changed_by(BEFORE, cell)


LOADERS = """
import numpy as np, jax, itertools, functools, copy, keras
from types import SimpleNamespace
from collections import namedtuple
from flax import nnx
rng = np.random.default_rng(0)
class Loader:
    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.order = np.arange(9)
    def __iter__(self):
        self.rng.shuffle(self.order)
        yield self.order
    def __getitem__(self, at):
        self.count += 1
        return at
    def __call__(self):
        return self.rng.normal()
    @property
    def batch(self):
        return self.rng.normal()
class Augmented(Loader):
    size = 3
class Net(nnx.Module):
    def __call__(self, x):
        return self.linear(self.bn(x))
def stream():
    while True:
        yield rng.normal()
def make_loader():
    made = Loader()
    return made
loader = Loader()
augmented = Augmented()
made = make_loader()
loaders = {"train": loader}
net = Net()
g = stream()
model = build()
x = np.ones(3)
cfg = {"a": {"lr": 1}}
views, models = [], {}
noise = lambda: rng.normal()
train_ds = load()
def find(m, name):
    for layer in m.layers:
        if layer.name == name:
            return layer
def freeze(layer):
    layer.trainable = False
def set_lr(owner, lr):
    owner.lr = lr
set_model_lr = functools.partial(set_lr, model)
def one_batch(dl):
    for batch in dl:
        return batch
"""


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("model.get_layer('a').trainable = False", "model"),
        ("model.get_layer('b').set_weights(w)", "model"),
        ("next(l for l in model.layers if l.name == 'a').trainable = False", "model"),
        ("for l in filter(None, model.layers): l.trainable = False", "model"),
        ("by = {l.name: l for l in model.layers}\nby['c'].trainable = False", "model"),
        ("find(model, 'd').trainable = False", "model"),
        ("layer = find(model, 'd')\nlayer.trainable = False", "model"),
        ("getattr(model, 'layers')[0].trainable = False", "model"),
        ("list(map(freeze, model.layers))", "model"),
        ("for _, m in nnx.iter_modules(model): m.rate = 0", "model"),
        ("for i, l in enumerate(model.layers): l.trainable = False", "model"),
        ("for v, w in zip(model.weights, new): v.assign(w)", "model"),
        ("x_flat = x.reshape(-1)\nx_flat -= 1", "x"),
        ("flat = np.asarray(x)\nflat[0] = 1", "x"),
        ("y = np.multiply(x, 2, out=x)", "x"),
        ("models['small'] = model\nmodels['small'].layers[0].trainable = False", "model"),
        ("c = dict(cfg)\nc['a']['lr'] = 2", "cfg"),
        ("c = copy.copy(cfg)\nc['a']['lr'] = 2", "cfg"),
        ("s = SimpleNamespace(m=model)\ns.m.trainable = False", "model"),
        ("S = namedtuple('S', 'm')\ns = S(model)\ns.m.trainable = False", "model"),
        ("keras.utils.clear_session()", "keras"),
        ("print(noise())", "rng"),
        ("set_model_lr(0.1)", "model"),
        ("for b in loader: break", "loader"),
        ("for b in loaders['train']: break", "loader"),
        ("one_batch(loader)", "loader"),
        ("one_batch(augmented)", "augmented"),
        ("one_batch(made)", "made"),
        ("first, *r = loader", "loader"),
        ("b = next(iter(loader))", "loader"),
        ("loader[0]", "loader"),
        ("loader()", "loader"),
        ("print(loader.batch)", "loader"),
        ("list(itertools.islice(g, 3))", "g"),
        ("for i, b in zip(range(3), g): print(b)", "g"),
        ("total = sum(1 for _ in g)", "g"),
    ],
)
def test_changes_of_parts_and_iterated_objects_are_found(cell: str, name: str) -> None:
    assert name in changed_by(LOADERS, cell)


@pytest.mark.parametrize(
    ("before", "cell", "name"),
    [
        ("convs = [l for l in model.layers]", "convs[0].trainable = False", "model"),
        ("views.append(x)", "views[0] += 1", "x"),
        ("s = {}\ns.update(m=model)", "s['m'].trainable = False", "model"),
        ("opt = model.optimizer", "opt.learning_rate.assign(1.0)", "model"),
        ("def head(): return model.layers[0]", "head().trainable = False", "model"),
    ],
)
def test_names_for_parts_are_known_in_later_cells(before: str, cell: str, name: str) -> None:
    assert name in changed_by(LOADERS, before, cell)


LOOKS = """
import pandas as pd, seaborn as sns
from sklearn.metrics import confusion_matrix, classification_report
def plot_history(history):
    for name, ax in zip(["loss", "accuracy"], plt.subplots(1, 2)[1]):
        ax.plot(history.history[name])
        ax.set_title(name)
def plot_confusion_matrix(y_true, y_pred, classes):
    cm = confusion_matrix(y_true, y_pred)
    cm = cm.astype("float") / cm.sum(axis=1)[:, np.newaxis]
    fig, ax = plt.subplots()
    ax.imshow(cm)
    for i, j in itertools.product(range(2), range(2)):
        ax.text(j, i, cm[i, j])
    ax.set_xticklabels(classes)
def plot_images(images, labels, n=9):
    fig, axes = plt.subplots(3, 3)
    for i, ax in enumerate(axes.flat):
        ax.imshow(images[i].reshape(28, 28))
        ax.set_title(str(labels[i]))
        ax.axis("off")
history = model.fit(x_train, y_train)
train_ds = load()
classes = ["a", "b"]
df = pd.read_csv("a.csv")
"""


@pytest.mark.parametrize(
    "cell",
    [
        "df.info()\ndf.describe()\ndf.isnull().sum()",
        "print(df['a'].unique(), df['a'].nunique(), df['a'].value_counts())",
        "corr = df.corr()\nsns.heatmap(corr, annot=True)\nplt.show()",
        "df.groupby('a').size().sort_values().plot(kind='bar')",
        "for col in df.columns:\n    plt.hist(df[col].dropna())\n    print(col, df[col].dtype)",
        "for ax, col in zip(axes, df.columns):\n    ax.hist(df[col])\n    ax.set_title(col)",
        "for ax, x, y in zip(axes.flat, x_train, y_train):\n    ax.imshow(x)\n    ax.set_title(y)",
        "for i, (ax, image) in enumerate(zip(plt.subplots(3)[1], x_train)):\n    ax.set_xlabel(i)",
        "df.isna().mean().reset_index().rename(columns={'index': 'c'}).head()",
        "plot_history(history)",
        "plot_images(x_train, y_train)",
        "y_pred = model.predict(x_test).argmax(1)\nplot_confusion_matrix(y_test, y_pred, classes)",
        "print(classification_report(y_test, model.predict(x_test).round()))",
        "image, label = next(iter(train_ds))\nplt.imshow(image[0])",
        "sample = next(iter(train_ds.take(1)))[0]\nprint(sample.shape)",
        "xb, yb = next(iter(train_ds))\nplot_images(xb, yb)",
        "for layer in model.layers:\n    print(layer.name, layer.output.shape, layer.count())",
        "w, b = model.layers[0].get_weights()\nprint(w.shape, b.mean())",
        "tf.keras.utils.plot_model(model, show_shapes=True)",
        "wrong = [i for i, p in enumerate(y_pred) if p != y_test[i]]\nwrong.sort()\nprint(wrong)",
        "n, d = x_train.shape\nn += 1",
        "score = model.evaluate(x_test, y_test, verbose=0)\nprint(f'{score[1]:.3f}')",
        "best = sorted(zip(scores, classes), key=lambda p: -p[0])\nprint(best[:3])",
        "counts = dict(zip(*np.unique(y_train, return_counts=True)))\nprint(counts)",
        "for x_, y_ in train_ds:\n    print(x_.shape)\n    break",
        "print(len(list(train_ds)), sum(1 for _ in train_ds))",
        "np.bincount(y_train)",
        "jax.tree.map(np.shape, model)",
    ],
)
def test_cells_of_tutorials_that_look_change_nothing(cell: str) -> None:
    used = {"model", "x_train", "y_train", "x_test", "y_test", "train_ds", "df", "classes", "opt"}
    assert not changed_by(BEFORE, LOOKS, cell) & used


@pytest.mark.parametrize(
    "cell",
    [
        "preds = net(x)",
        "print(loader, len(loader), type(g))",
        "shown = loader.order[:3]\nplt.plot(shown)",
        "losses = [net(b) for b in views]",
        "batch = next(g)\nplt.plot(batch)",
    ],
)
def test_uses_of_own_objects_that_take_no_items_change_nothing(cell: str) -> None:
    assert not changed_by(LOADERS, cell) & {"net", "loader", "x", "model", "views"}


def test_long_chains_and_cycles_of_functions_are_followed() -> None:
    """Functions of big modules call each other hundreds of times deep, also in cycles."""
    chain = "\n".join(f"def f{i}(a):\n    f{i + 1}(a)" for i in range(500))
    last = "def f500(a):\n    a.lr = 1\n    f0(a)"
    node = "class A(B):\n    @property\n    def size(self):\n        return self.parent.size"
    other = "class B(A):\n    def __iter__(self):\n        return iter(self.parent)"
    trees = [*map(ast.parse, (chain, last, node, other, "f0(model)\nprint(tree.size)"))]
    changes = PossibleChanges(trees)
    assert changes.of_cell(trees[-1]) == {"model"}


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
    used = {"model", "opt", "x_train", "y_train", "x_test", "train_ds", "params", "x", "df", "text"}
    assert not changed_by(BEFORE, cell) & used
