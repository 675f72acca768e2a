"""Replays a plan without its model: real processes and messages, and actions that wait as long as the plan says.

Here: emulate runs a rank's steps and finds what this machine can keep; devices has a device's time, its stages and its
channels, which stand where the executor has real ones. Not here: the order of a program, which the executor keeps.
"""
