"""Updates of a state ``s`` from ``x``, both float[4]: those that may be made where it lies, and those that may not."""

from __future__ import annotations

#: A state that is kept where the sum of x is 0: what the other branch computes of it, and what it gives besides.
BRANCHES = (
    "t = ReduceSum <keepdims = 0> (x)  c = Cast <to = 9> (t)  s_new, seen = If (c) <then_branch = a () => (float[4] p, "
    "float[4] o) {{ {}  {} }}, else_branch = b () => (float[4] q, float[4] r) {{ q = Identity(s)  r = Exp(x) }}>"
)
#: One that is updated row by row: what is read, more attributes, and what the body makes of rows r of s and q of x.
SCAN = (
    "k = Constant <value_ints = [4, 1]> ()  y = Reshape(x, k)  s_new = Scan ({}) <num_scan_inputs = 2{}, "
    "body = b (float[1] r, float[1] q) => (float[1] p) {{ {} }}>  seen = Relu(x)"
)
ROWS = "(float[4, 1] s, float[4] x) => (float[4, 1] s_new, float[4] seen)"
#: One of which some rows are written: what is read of it, and the update.
ROWS_OF = "k = Constant <value_ints = [3, 1]> ()  i = Constant <value = int64[2, 1] {{3, 1}}> ()  {}  s_new = {}  seen = Relu(x)"
SAFE = {
    "elementwise": "s_new = Sub(s, x)  seen = Relu(x)",
    "second operand": "s_new = Add(x, s)  seen = Relu(x)",
    "scalar operand": "two = Constant <value_float = 2.0> ()  s_new = Mul(s, two)  seen = Relu(x)",
    "not read by its producer": "a = Mul(s, x)  b = Exp(a)  s_new = Sqrt(b)  seen = Relu(x)",
    "reader is an ancestor": "seen = Exp(s)  a = Add(seen, x)  s_new = Mul(s, a)",
    "reader of the new value": "s_new = Sub(s, x)  seen = Relu(s_new)",
    "gate": "z = Sub(x, x)  ok = Equal(z, x)  n = Mul(s, x)  s_new = Where(ok, n, s)  seen = Relu(x)",
    "rows of it": ROWS_OF.format("e = Gather(s, k)", "ScatterND(s, i, e)"),
    "rows added to it": ROWS_OF.format("e = Gather(x, k)", 'ScatterND <reduction = "add"> (s, i, e)'),
    "branches": BRANCHES.format("n = Exp(s)  p = Add(s, n)", "o = Identity(x)"),
    "view read by an ancestor": "v = Identity(s)  e = Exp(v)  s_new = Add(s, e)  seen = Relu(x)",
}
UNSAFE = {
    "late reader": ("s_new = Sub(s, x)  seen = Exp(s)", "Exp 'seen' may read it after"),
    "state fetched": ("s_new = Sub(s, x)  seen = Identity(s)", "Identity 'seen' may read it after"),
    "not elementwise": ("a = Constant <value_int = 0> ()  s_new = CumSum(s, a)  seen = Relu(x)", "not elementwise"),
    "three terms": ("s_new = Sum(x, x, s)  seen = Relu(x)", "Sum 's_new', which makes the update, is not elementwise"),
    "passed through": ("s_new = Identity(s)  seen = Relu(x)", "not elementwise"),
    "unknown operator": ("a = foreign.Thing(s)  s_new = Sub(s, x)  seen = foreign.Thing(a)", "may read it after"),
    "view read late": ("v = Identity(s)  s_new = Sub(s, x)  seen = Exp(v)", "may read it after"),
    "view of a view": ("v = Identity(s)  u = Identity(v)  s_new = Sub(s, x)  seen = Exp(u)", "may read it after"),
    "view at the producer": ("v = Identity(s)  s_new = Sub(v, x)  seen = Relu(x)", "not elementwise"),
    "condition of the gate": ("c = Cast <to = 9> (s)  s_new = Where(c, x, x)  seen = Exp(s)", "may read it after"),
    "nested graph": (
        "t = ReduceSum <keepdims = 0> (x)  c = Cast <to = 9> (t)  s_new = Sub(s, x)  seen = If (c) "
        "<then_branch = a () => (float[4] p) { p = Exp(s) }, else_branch = b () => (float[4] q) { q = Exp(x) }>",
        "If 'seen' may read it after",
    ),
    "late reader in a branch": (BRANCHES.format("p = Add(s, x)", "o = Exp(s)"), "Exp 'o' may read it after"),
    "branch that is not elementwise": (BRANCHES.format("p = Sum(x, x, s)", "o = Exp(x)"), "not elementwise"),
    "rows that it is": (
        "i = Constant <value = int64[4, 1] {3, 1, 0, 2}> ()  s_new = ScatterND(x, i, s)  seen = Relu(x)",
        "not elementwise",
    ),
    "rows read late": (
        "i = Constant <value = int64[2, 1] {3, 1}> ()  k = Constant <value_ints = [3, 1]> ()  e = Gather(x, k)  "
        "s_new = ScatterND(s, i, e)  seen = Exp(s)",
        "may read it after",
    ),
    "given, not made": ("seen = Sub(s, x)", "no node produces"),
}
