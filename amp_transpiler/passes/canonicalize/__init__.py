"""Programs in the form that later passes expect: one opset, straight-line control flow, whole norms."""
