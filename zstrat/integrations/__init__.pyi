from . import keras as keras
