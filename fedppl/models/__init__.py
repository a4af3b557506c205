"""The papers' models, declared in PyMC: ``from fedppl.models import hm1``.

They are written against public names only, and lie in the repository's folder ``models``. The wheel has that folder in
this one's place; in a checkout this file says where it lies.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "models")]
