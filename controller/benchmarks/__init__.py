"""The Jobs that measure the speed of models that nobody has measured."""
