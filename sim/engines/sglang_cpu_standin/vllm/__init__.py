"""Not vLLM: the one operator of it that SGLang asks for on a CPU, by a stand-in. For simulated machines alone."""
