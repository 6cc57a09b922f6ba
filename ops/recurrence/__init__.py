r"""Linear recurrences: attention whose state is a matrix that decays, with the delta rule's correction or without.

Sources: the gated delta rule and its chunked form are Yang et al., "Gated Delta Networks", 2024,
https://arxiv.org/abs/2412.06464; the recurrence without a correction, in chunks, is Dao and Gu, "Transformers are
SSMs", 2024, https://arxiv.org/abs/2405.21060; a later account of both is Kimi Team, "Kimi Linear", 2025,
https://arxiv.org/abs/2510.26692.

For one head, with keys and queries of K values, values of V, and a state S [K, V]:

    S_t = exp(g_t) S_{t-1} + k_t u_t^T        with u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)    or    u_t = v_t
    o_t = scale S_t^T q_t

**Chunks.** Let a chunk of C tokens begin with the state S, its tokens be the rows of Q, K, V and U, and

    d_t = exp(g_1 + ... + g_t)        D_tj = exp(g_{j+1} + ... + g_t) for j <= t        e_j = exp(g_{j+1} + ... + g_C)

Each is the exponential of a sum of log decays, so of a number that is at most 0, and never that of a difference of two
sums: nothing overflows, and nothing cancels where one decay is strong. Written out, S_t = d_t S + sum_j D_tj k_j u_j^T.
Put into u_t, this is a triangular system, whose solution is the WY form of the product of the chunk's corrections:

    A = beta_t D_tj (k_t . k_j) below the diagonal, 0 elsewhere        T = (I + A)^{-1}
    R = beta (V - d K S)                                               U = T R

    P = scale D_tj (q_t . k_j) on the diagonal and below
    O = scale d Q S + P U
    S' = d_C S + K^T (e U)                                             the state that the next chunk begins with

where d, e and beta multiply rows. So all of a chunk but R, U and S' is known for all chunks at once, and only these
go from chunk to chunk. Without a correction U = V.

**Backward.** Given dO, and the gradient dS' of the chunk's last state, from the last chunk to the first:

    dU = P^T dO + e K dS'
    dR = T^T dU
    dS = d_C dS' + Q^T (scale d dO) - K^T (beta d dR)

For T = (I + A)^{-1}, dA = -T^T dT T^T; with dT = dU R^T this is dA = -dR U^T, below the diagonal. Then for each chunk,
with dP = dO U^T, M = scale D dP and N = beta D dA:

    dV    = beta dR
    dQ    = scale d (dO S^T) + M K
    dK    = e (U dS'^T) - beta d (dR S^T) + M^T Q + (N + N^T) K
    dbeta = rows of dR . V  -  d k . (dR S^T)  +  rows of (D dA) . (K K^T)

The logarithms of the decays have the gradients

    log D:  M_tj (q_t . k_j) + N_tj (k_t . k_j)        log d:  scale d q . (dO S^T) - beta d k . (dR S^T)
    log e:  e k . (U dS'^T)                            log d_C:  d_C sum(S dS')

and dg_s is the sum of those of D_tj with j < s <= t, of d_t with t >= s, of e_j with j < s, and of d_C. Without a
correction dV = dU, and every term with dR, beta or N is left out.

**Packed sequences.** Where t and j are in different sequences D_tj is 0; d_t is 0 where t is not in the sequence that
the chunk's first state belongs to, e_j where j is not in that of the last token, and d_C where these two differ.

**Kernels.** `chunk_scores_kernel` and `chunk_inverse_kernel` make d, e, P, A and T of every chunk, the inverse in
float32 by blocks of twice the size each time; `chunk_states_kernel` goes from chunk to chunk, a program for each head
and block of V, and stores each chunk's S and U; `chunk_outputs_kernel` makes O. The backward pass repeats the first
three, goes back from chunk to chunk in `chunk_states_backward_kernel`, and makes M, N and the gradients of each chunk
in two kernels more. Gradients of a key head are those of its value heads, in float32, added in their order: no atomics.
The operands of each product are rounded once to the dtype of Q; S, T, the decays and all sums are float32.

Nothing is kept for the backward pass but the inputs. For each value head and 64 tokens it has in memory S and dS', each
K * V float32 numbers, four or five matrices of 64 * 64, and dR, dQ and dK in float32.
"""
