"""
Does a network know when it has never seen a digit?
===================================================

Ten clients have images of handwritten digits, each of only five of the ten. They share the first layer of a network and
keep the last one. Accuracy comes from sharing; the question here is what a posterior of the shared weights adds:
whether the probabilities hold, and whether the network is unsure of digits that a client has never seen.
"""

# %%
# The clients
# -----------
#
# scikit-learn's digits, 8 x 8 pixels. Rows are disjoint: every client has fifteen images of each of its five digits for
# training and fifteen for testing. Pixels are scaled by sums over all clients' training rows, which is three numbers
# from each client.

import functools

import matplotlib.pyplot as plt
import numpy as np
import pymc as pm
import torch
from sklearn.datasets import load_digits

import fedppl

CLIENTS, LABELS, EACH, TRAINED, TESTED = 10, 10, 5, 15, 15
rng = np.random.default_rng(0)
X, y = load_digits(return_X_y=True)
stock = {digit: list(rng.permutation(np.flatnonzero(y == digit))) for digit in range(LABELS)}
# Client k has the digits k, k + 1, k + 2, k + 3 and k + 5, so that all digits are held equally often.
held = {f"client {k}": [(k + step) % LABELS for step in (0, 1, 2, 3, 5)] for k in range(CLIENTS)}
train, test = {}, {}
for name, digits in held.items():
    train[name] = [stock[digit].pop() for digit in digits for _ in range(TRAINED)]
    test[name] = [stock[digit].pop() for digit in digits for _ in range(TESTED)]

count, total, squares = np.sum([(X[at].size, X[at].sum(), (X[at] ** 2).sum()) for at in train.values()], axis=0)
mean = total / count
images = ((X - mean) / np.sqrt(squares / count - mean**2)).astype(np.float32)
data = {name: {"X": images[at], "y": y[at]} for name, at in train.items()}

figure, axes = plt.subplots(2, 10, figsize=(9, 2.2), layout="constrained")
for row, name in zip(axes, ("client 0", "client 5"), strict=True):
    shown = np.reshape(train[name], (EACH, TRAINED))[:, :2].ravel()
    for axis, at in zip(row, shown, strict=True):
        axis.imshow(X[at].reshape(8, 8), cmap="gray_r")
        axis.set(xticks=[], yticks=[])
    row[0].set_ylabel(name)
_ = figure.suptitle("What two of the clients train on", fontsize=10)

# %%
# A network inside a PyMC model
# -----------------------------
#
# The network is made once, and where it starts is where all clients start. Its first layer is shared; the second, the
# head, is local and never sent. Each client releases its weights of the first layer after training, and with ``FedSI``
# their variances. Weights of networks can hold the images that trained them: :doc:`/privacy`.

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 40), torch.nn.ReLU(), torch.nn.Linear(40, LABELS))


def classifier(X, y, *, net):
    """One client's digits."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        logits = fedppl.nn.module(net, fedppl.nn.parameters(net, sigma=1.0), X)
        pm.Categorical("digit", logit_p=logits, observed=y)
    return model


model = fedppl.FederatedModel(functools.partial(classifier, net=net), shared=["0.weight", "0.bias"])

# %%
# Two fits
# --------
#
# ``FedAvg`` with a local head (known as FedPer) averages points. ``FedSI`` infers a posterior of the weights that the
# rows speak about. Each runs for fifteen rounds, ``FedSI`` at a learning rate of 0.01 and ``FedAvg`` at its usual
# 0.001.
#
# Two messages are to be expected in the log. Weights still move after fifteen rounds, and a status of ``max_rounds``
# with a warning says so; networks are usually stopped like this. ``FedAvg`` makes no use of the priors, and says that.

ROUNDS = 15
average = fedppl.nn.FedAvg(learning_rate=1e-3)
fits = {
    "averages of points": fedppl.fit(model, data, average, rounds=ROUNDS, progressbar=False, random_seed=1),
    "posterior of weights": fedppl.fit(
        model, data, fedppl.nn.FedSI(learning_rate=1e-2), rounds=ROUNDS, progressbar=False, random_seed=1
    ),
}
for name, fit in fits.items():
    print(f"{name}: {fit.status.value}, {fit.message}")

# %%
# Scores on test rows
# -------------------
#
# ``personalise`` makes the shared network a client's own, and ``predict`` counts what is not known of the weights. The
# third row of the table is the second fit with its weights as a point (``link="map"``): the difference is what
# inference adds. Entropy of the predicted probabilities should be larger for digits that a client has never seen; AUROC
# is the probability that it is, for one image of each kind.

metrics = fedppl.metrics
everything = np.concatenate(list(test.values()))
unseen = {name: everything[~np.isin(y[everything], digits)] for name, digits in held.items()}
own = {how: {name: fedppl.nn.personalise(fit, name) for name in data} for how, fit in fits.items()}


def predicted(how, rows, link="scaled"):
    """Probabilities of these rows of every client, by its own network."""
    return {
        name: fedppl.nn.predict(fits[how], own[how][name], {"X": images[at]}, link=link)["probability"].values
        for name, at in rows.items()
    }


ways = {
    "averages of points": ("averages of points", "scaled"),
    "posterior of weights": ("posterior of weights", "scaled"),
    "  its weights as a point": ("posterior of weights", "map"),
}
label = np.concatenate([y[at] for at in test.values()])
known, strange = {}, {}
print(f"{'':26}{'accuracy':>9}{'ECE':>7}{'Brier':>7}{'AUROC, unseen digits':>22}")
for title, (how, link) in ways.items():
    seen, other = predicted(how, test, link), predicted(how, unseen, link)
    known[title], strange[title] = np.concatenate(list(seen.values())), np.concatenate(list(other.values()))
    ranks = [metrics.auroc(metrics.entropy(other[name]), metrics.entropy(seen[name])) for name in data]
    print(
        f"{title:26}{metrics.accuracy(known[title], label):9.3f}"
        f"{metrics.expected_calibration_error(known[title], label, bins=10):7.3f}"
        f"{metrics.brier(known[title], label):7.3f}{np.mean(ranks):22.3f}"
    )

# %%
# Reliability diagrams
# --------------------
#
# Above: how often rows of some confidence were right; on the diagonal, probabilities hold. Below: how many rows had
# that confidence. Bars of few rows are mostly noise.

figure, axes = plt.subplots(2, 3, figsize=(10, 6), sharex=True, layout="constrained")
for column, title in zip(axes.T, ways, strict=True):
    fedppl.plots.reliability(known[title], label, bins=10, ax=column)
    column[0].set_title(f"{title.strip()}\n{column[0].get_title()}", fontsize=10)

# %%
# Digits that a client has never seen
# -----------------------------------

figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
bins = np.linspace(0, np.log(LABELS), 25)
for axis, title in zip(axes, ways, strict=True):
    for rows, color, what in ((known, "C0", "own digits"), (strange, "C1", "unseen digits")):
        axis.hist(metrics.entropy(rows[title]), bins, density=True, color=color, alpha=0.55, label=what)
    axis.set(xlabel="predictive entropy, nats", title=title.strip())
axes[0].set_ylabel("density")
_ = axes[0].legend(frameon=False)

# %%
# What to take away
# -----------------
#
# - Accuracy is that of the weights at their point. What a posterior of them changes is how sure the network says it is:
#   it is less sure, of all digits, and more so of those that it has not seen.
# - Less sure is not always better calibrated. Here most bars lie above the diagonal: the network is right more often
#   than it says, and its weights as a point are better calibrated. The width comes from ``FedSI(prior_variance=...)``,
#   whose default was chosen on larger images, and would have to be chosen on held-out rows here. Nothing on this page
#   was chosen by test rows.
# - Part of the difference between two methods is how they train. Only the difference between the second and the third
#   row of the table is inference. :doc:`/fedsi` has both on larger data.
# - Entropy ranks unseen digits above known ones better than chance, and the histograms overlap all the same. A network
#   does not know for sure what it has never been shown.
# - The heads stay at the clients. The first layer does not, and there is no differential privacy in it:
#   :doc:`/privacy`.
# - :doc:`/networks` says how to declare other networks and other outcomes, :doc:`/plots` has the other pictures.
