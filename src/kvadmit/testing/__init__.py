"""What tests and the simulator stand on: a memory driver made of arithmetic.

Shipped with the package so that a plugin's author or a reviewer can drive the machines
without a device. Nothing here is imported by the running system.
"""
