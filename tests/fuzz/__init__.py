"""Models, files and arguments made wrong at random, and what every command makes of them.

``python -m tests.fuzz --cases 2000 --seed 0`` runs that many; see :mod:`.__main__`.
"""
