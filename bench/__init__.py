"""Benchmarks: one file each; micro/ for the hot paths, results/ with the machine they ran on."""
