"""Asks a model of the Hugging Face Hub that nobody has read, in a process that reaches nothing:

    python examples/hub_model.py hf://owner/model "a text"

It takes models for texts: chats, embeddings and labels. moonpool needs its extra `hub`.
"""

import sys

import numpy as np

import moonpool

address, text = sys.argv[1:]
with moonpool.Runtime(sandbox="strict", listener=moonpool.Progress()) as runtime:
    runtime.load("m", address)
    task = runtime.config("m").parameters["task"]
    if task == "text-generation":
        for chunk in runtime.chat("m", [{"role": "user", "content": text}], stream=True):
            for choice in chunk["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
        print()
    elif task == "embeddings":
        print(runtime.embed("m", [text]))
    else:
        found = runtime.infer("m", {"TEXT": np.array([[text.encode()]], object)})
        print({name: found[name].tolist() for name in found})
