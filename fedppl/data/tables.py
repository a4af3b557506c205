"""What a partition looks like: rows of every label at every client, as a table and as stacked bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedppl.data._slices import Partition, require_column
from fedppl.types import DataError, DeclarationError

if TYPE_CHECKING:
    import pandas as pd


def table(partition: Partition, labels: Any) -> pd.DataFrame:
    """Rows of every label at every client, and their total: a row for each client.

    Parameters
    ----------
    partition
        What `label_skew` and its like returned.
    labels
        Label of every row that was divided, (n,), in the same order.

    Returns
    -------
    pandas.DataFrame
        A row for each client; a column "rows", then one for each label in rising order.

    Raises
    ------
    DataError
        If there are not as many labels as rows, or they are none: not one for every row, of several types, or numbers
        that are missing or infinite.
    DeclarationError
        If `partition` is none.

    Examples
    --------
    >>> from fedppl.data import label_skew
    >>> labels = np.repeat([0, 1], 30)
    >>> int(table(label_skew(labels, 4, 1, random_seed=0), labels)["rows"].sum())
    60

    Notes
    -----
    *When this fails.* Only the number of labels is checked: those of other rows, or in another order, are counted all
    the same. Outcomes that are no classes have a column for every value: bin them first.
    """
    import pandas as pd

    if not isinstance(partition, Partition):
        raise DeclarationError(
            f"partition is {type(partition).__name__}; pass what label_skew and its like return, then the labels."
        )
    y = require_column("labels", labels)
    held = sum(len(at) for at in partition.rows.values())
    if len(y) != held:
        raise DataError(f"{len(y)} labels for a partition of {held} rows; pass those of the rows that were divided.")
    known = np.unique(y)
    counts = {name: [int(np.sum(y[at] == label)) for label in known] for name, at in partition.rows.items()}
    found = pd.DataFrame.from_dict(counts, orient="index", columns=known.tolist())
    if "rows" in found:
        raise DataError("a label is called 'rows', as the column of counts is; call it something else.")
    found.insert(0, "rows", [len(at) for at in partition.rows.values()])
    return found.rename_axis(index="client", columns="label")


def plot(partition: Partition, labels: Any, ax: Any = None) -> Any:
    """Draw rows of every label at every client as stacked bars; the axes are returned.

    Parameters
    ----------
    partition, labels
        As in `table`.
    ax
        Matplotlib axes; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DataError, DeclarationError
        As in `table`.
    ModuleNotFoundError
        If matplotlib is not installed.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> from fedppl.data import label_skew
    >>> labels = np.repeat([0, 1, 2], 40)
    >>> axes = plot(label_skew(labels, 6, 2, random_seed=1), labels)
    >>> len(axes.patches)  # a bar for each of 3 labels at each of 6 clients
    18

    Notes
    -----
    *When this fails.* There are 20 colours: with more labels they repeat, and there is no legend. Bars stand in the
    order of the clients and have no names; `table` has the ids and the numbers.
    """
    import matplotlib.pyplot as plt

    counts = table(partition, labels).drop(columns="rows")
    axes = plt.subplots(figsize=(max(6.0, 0.18 * len(counts)), 3.5), layout="constrained")[1] if ax is None else ax
    bottom, colours = np.zeros(len(counts)), plt.get_cmap("tab20")
    for k, label in enumerate(counts.columns):
        axes.bar(
            np.arange(len(counts)), counts[label], bottom=bottom, width=0.9, color=colours(k % 20), label=str(label)
        )
        bottom += counts[label].to_numpy()
    axes.set(xlabel="client", ylabel="rows", xlim=(-0.6, len(counts) - 0.4))
    axes.set_xticks([])
    if len(counts.columns) <= 20:
        axes.legend(title="label", fontsize="small", ncols=2)
    return axes
