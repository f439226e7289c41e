#!/usr/bin/env python3
"""Makes colors.mlpackage, a classifier of the color of a picture, as an old coremltools writes it.

    python generate.py            (coremltools==7.2, numpy<2, Python 3.10)

The package takes an RGB picture of 4 x 6 pixels, scaled to -1..1, and gives the label `red`, `green`, `blue` or `white` with the
probabilities. Its weight file has whatever coremltools 7 leaves in the fields that were not initialised then. For a picture of one color,
x = color / 127.5 - 1, the logits are W x: 3 for the channel, 1 for white, and so on.
"""
import os
import numpy as np
import coremltools as ct
from coremltools.converters.mil import Builder as mb

W = np.array([[3, -2, -2], [-2, 3, -2], [-2, -2, 3], [1, 1, 1]], np.float32)


@mb.program(input_specs=[mb.TensorSpec(shape=(1, 3, 4, 6))])
def program(image):
    return mb.softmax(x=mb.linear(x=mb.reduce_mean(x=image, axes=[2, 3], keep_dims=False), weight=W), axis=-1, name="p")


image = ct.ImageType(name="image", shape=(1, 3, 4, 6), scale=1 / 127.5, bias=[-1, -1, -1])
labels = ct.ClassifierConfig(["red", "green", "blue", "white"])
model = ct.convert(program, convert_to="mlprogram", inputs=[image], classifier_config=labels, compute_precision=ct.precision.FLOAT32)
model.save(os.path.join(os.path.dirname(os.path.abspath(__file__)), "colors.mlpackage"))
