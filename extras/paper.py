"""The paper's own figures, as data, for whatever prints ours beside them. Percentages of pass@1 unless named."""

# Table 2's columns, in its order: domain -> heading.
COLUMNS = {"tau:airline": "tau Air", "tau:retail": "tau Ret", "tau2:airline": "tau2 Air", "tau2:retail": "tau2 Ret",
           "tau2:telecom": "tau2 Tel", "tau3:airline": "tau3 Air", "tau3:retail": "tau3 Ret",
           "tau3:telecom": "tau3 Tel", "tau3:banking_knowledge": "tau3 Bank"}

# Mean over three trained runs in the rows of RL; the last number is the average.
TABLE_2 = {
    "8B base": (20.0, 47.0, 14.0, 40.4, 4.4, 14.0, 36.0, 21.1, 3.1, 22.2),
    "8B SFT": (14.0, 39.1, 24.0, 36.0, 2.6, 16.0, 40.4, 28.9, 3.1, 22.7),
    "8B Interactive GRPO": (28.0, 52.2, 32.0, 46.5, 30.7, 39.3, 50.0, 29.8, 3.4, 34.7),
    "8B FACA": (37.3, 43.8, 38.0, 54.4, 41.2, 40.0, 53.5, 53.5, 3.4, 40.6),
    "14B base": (12.0, 59.1, 26.0, 49.1, 2.6, 14.0, 50.0, 23.7, 3.1, 26.6),
    "14B SFT": (14.0, 49.6, 30.0, 47.4, 1.8, 22.0, 43.0, 16.7, 4.1, 25.4),
    "14B Interactive GRPO": (36.0, 58.3, 34.0, 69.0, 26.3, 40.0, 64.6, 50.6, 3.8, 42.5),
    "14B FACA": (38.0, 56.5, 38.0, 62.3, 83.6, 40.7, 65.5, 82.7, 7.2, 52.7),
}
# Of the average: (mean, sample standard deviation) over seeds, and FACA minus Interactive GRPO for each.
SPREAD = {"8B Interactive GRPO": (34.66, 0.25), "8B FACA": (40.57, 1.04),
          "14B Interactive GRPO": (42.51, 0.12), "14B FACA": (52.73, 1.53)}
GAINS = {"8B": (4.67, 6.33, 6.75), "14B": (8.62, 10.14, 11.91)}

# Table 4, of 8B's first run: (average, tau2 Telecom).
TABLE_4 = {"8B lambda 0.5": (39.37, 47.37), "8B lambda 0.1": (36.78, 45.61), "8B lambda -0.5": (15.08, 17.11),
           "8B shifted 0.5": (33.92, 29.39), "8B randomized 0.5": (32.66, 26.32), "8B outcome only": (34.70, 30.26)}

# Paired tasks of 14B's first runs, FACA against Interactive GRPO: both, FACA only, Interactive GRPO only, neither; and
# of the FACA-only wins, how many the other lost by its error budget (the rest stopped without task closure).
CELLS = {"tau2:telecom": ((23, 73, 7, 11), 68), "tau3:telecom": ((47, 48, 11, 8), 28)}

# Of the runs with lambda .5: positive-reaction share and nonzero process coverage over the first and the last 40 steps
# (8B), outcome-homogeneous groups and process share of L1 (8B, 14B), steps of 120 where process exceeds outcome.
TELEMETRY = {"positive_share": (69.95, 82.51), "coverage": (86.16, 82.50), "homogeneous": (39.27, 31.04),
             "process_share": (36.00, 33.79), "process_exceeds": (6, 1)}
