"""Mixed and pure 16-bit precision for ONNX programs: rewriting, training and serving on stock onnxruntime."""

from pathlib import Path as _Path

_root = _Path(__file__).resolve().parent.parent
if (_root / "ops" / "__init__.py").is_file() and (_root / "amp_transpiler" / "__init__.py").is_file():
    __path__.append(str(_root))  # a checkout keeps the subpackages ops and lists at its top level

__version__ = "0.1.0"
