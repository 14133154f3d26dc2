"""Groups of experts. A smaller layer has one expert for each group."""

import numpy as np
from scipy.cluster import hierarchy
from scipy.spatial import distance

Groups = list[list[int]]


def most_used(use: np.ndarray, count: int) -> Groups:
    """Returns the most used experts, each a group of its own, in ascending order.

    Args:
        use: <float>[num_experts], share of the tokens. Of equally used experts the first is taken.
        count: int. Number of groups.
    """
    return [[int(expert)] for expert in sorted(np.argsort(-use, kind="stable")[:count])]


def most_similar(kernels: list[np.ndarray], count: int) -> Groups:
    """Joins the most similar experts until as many groups are left.

    Clusters hierarchically with average linkage, as HC-SMoE (arXiv 2410.08589), by the cosine distance of all kernels
    of an expert, because these are averaged.

    Args:
        kernels: <float>[num_experts, ...] each.
        count: int. Number of groups.

    Returns:
        Groups in the order of their first experts.
    """
    products = sum(flat @ flat.T for flat in (kernel.reshape(len(kernel), -1) for kernel in kernels))
    norms = np.sqrt(np.maximum(np.diag(products), np.finfo(np.float32).tiny))
    distances = np.clip(1 - products / np.outer(norms, norms), 0, None).astype(np.float64)
    np.fill_diagonal(distances, 0)
    tree = hierarchy.linkage(distance.squareform(distances, checks=False), "average")
    labels = hierarchy.cut_tree(tree, n_clusters=count).ravel()
    groups = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    return sorted(groups)
