"""Numbers from reports: means by table, significance tests, distance from print, paired comparisons."""
