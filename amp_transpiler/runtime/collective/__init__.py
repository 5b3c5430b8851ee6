"""Engines for several ranks behind one small interface; :mod:`amp_transpiler.distributed` is what users call."""
