# Needs Python >= 3.11 and make; everything else lands in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# The tests start hundreds of interpreters: what one has compiled the next need not, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check
SOURCES := $(sort $(shell find amp_transpiler ops lists -type f \( -name '*.py' -o -name '*.toml' -o -name '*.json' -o -path '*/report/page/*' -o -name py.typed \)))

.PHONY: demo test test-gpu test-webgpu test-runners bench clean FORCE

demo: $(VENV)/.demo
	$(PY) demo/quickstart.py

test: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet .
	@# The installed package is what a user's type checker sees, so mypy runs outside the checkout.
	@echo "mypy -p amp_transpiler, installed; calls as a user writes them"
	@here="$$PWD"; tmp="$$(mktemp -d)"; cd "$$tmp" && cp "$$here/tests/project/typed_calls.py" . && \
	"$$here/$(PY)" -m mypy -p amp_transpiler --config-file "$$here/pyproject.toml" && "$$here/$(PY)" -m mypy --strict typed_calls.py; \
	status=$$?; cd "$$here"; rm -rf "$$tmp"; exit $$status
	$(PY) -m pytest -q -m "not gpu and not webgpu" -n auto --dist loadfile

# Runs the tests marked gpu, and what proves rules, computed there; a machine that cannot run them says so and passes.
test-gpu: $(VENV)/.test
	@if ! $(PY) -m tests.tools.gpu_device --driver; then exit 0; fi; \
	$(PY) -m tests.tools.gpu_device >/dev/null 2>&1 || $(INSTALL) '.[test,cuda]'; \
	if ! $(PY) -m tests.tools.gpu_device; then exit 0; fi; \
	$(PY) -m pytest -q -m gpu && $(PY) -m pytest -q --place cuda -m rules tests/ops

# Runs what computes on WebGPU: on the machine's GPU, else in software. VULKAN=install: with apt-get, where no driver is.
test-webgpu: $(VENV)/.test
	@$(PY) -m tests.tools.webgpu_run $(VENV)/webgpu $(if $(filter install,$(VULKAN)),--install-vulkan)

# Runs the runners of demo/runners in other languages too, and the page of demo/browser. What there is of: packages of npm
# (without scripts: those of onnxruntime-node fetch CUDA libraries), an environment with onnxruntime of their version, C++
# headers, the interfaces for C# and Java (npm's package for Unity; with Mono or a JDK), Chromium.
test-runners: $(VENV)/.test
	@if command -v npm >/dev/null; then \
	for folder in demo/runners demo/browser; do \
	npm install --prefix $$folder --ignore-scripts --no-package-lock --no-audit --no-fund --silent || exit 1; done && \
	version="$$(node -p "require('./demo/runners/package.json').dependencies['onnxruntime-node']")" && \
	$(PYTHON) -m venv $(VENV)/runners && \
	$(VENV)/runners/bin/python -m pip install --quiet --disable-pip-version-check onnxruntime==$$version ml_dtypes safetensors; \
	else echo "npm is not here: the runners in JavaScript are not tested"; fi
	@AMP_RUNNERS=1 AMP_RUNNERS_PYTHON="$$(ls $$PWD/$(VENV)/runners/bin/python 2>/dev/null)" \
	AMP_RUNNERS_HEADERS="$$($(PY) -m tests.tools.ort_headers $(VENV)/ort_headers)" \
	AMP_RUNNERS_BINDINGS="$$($(PY) -m tests.tools.ort_bindings $(VENV)/ort_bindings)" \
	AMP_BROWSER="$$(command -v chromium || command -v chromium-browser || command -v google-chrome)" \
	$(PY) -m pytest -q -n auto --dist loadgroup tests/export/test_runners.py \
	tests/export/test_browser.py tests/export/test_browser_webgpu.py

# TORCH_PYTHON: an interpreter of another environment that has torch, to compare with.
bench: $(VENV)/.test
	$(PY) -m tests.benchmarks.run $(if $(TORCH_PYTHON),--torch-python $(TORCH_PYTHON))

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Python >= 3.11 is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1); name another one: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The list of sources changes when a file comes or goes, which no file's own time would show.
$(VENV)/.sources: FORCE | $(PY)
	@echo '$(SOURCES)' | cmp -s - $@ || echo '$(SOURCES)' > $@

# A build folder left from before would carry deleted modules into the new wheel.
$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: pyproject.toml $(SOURCES) $(VENV)/.sources | $(PY)
	rm -rf build *.egg-info
	$(INSTALL) '.[$*]'
	@rm -rf build *.egg-info
	@touch $@
