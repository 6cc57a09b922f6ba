r"""Linear attention: recurrences whose state is a matrix that decays, with or without the delta rule's correction.

Sources: the gated delta rule and its chunked form are Yang et al., "Gated Delta Networks", 2024,
https://arxiv.org/abs/2412.06464; the recurrence without a correction, in chunks, is Dao and Gu, "Transformers are
SSMs", 2024, https://arxiv.org/abs/2405.21060. A decay for each channel of the keys is Yang et al., "Gated Linear
Attention Transformers with Hardware-Efficient Training", 2023, https://arxiv.org/abs/2312.06635, and with the delta
rule Kimi Team, "Kimi Linear", 2025, https://arxiv.org/abs/2510.26692.

For one head, with keys and queries of K values, values of V, and a state S [K, V]:

    S_t = exp(g_t) S_{t-1} + k_t u_t^T        with u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)    or    u_t = v_t
    o_t = scale S_t^T q_t

**Chunks.** Let a chunk of C tokens begin with the state S, its tokens be the rows of Q, K, V and U, and

    d_t = exp(g_1 + ... + g_t)        D_tj = exp(g_{j+1} + ... + g_t) for j <= t        e_j = exp(g_{j+1} + ... + g_C)

Each is the exponential of a sum of log decays, so of a number that is at most 0, and never that of a difference of two
rounded sums: nothing overflows, and nothing cancels where one decay is strong. Kernels take differences of sums that
are exact, of multiples of 2**-8, and of sums of what these leave of each log decay.

Written out, S_t = d_t S + sum_j D_tj k_j u_j^T. Put into u_t, this is a triangular system, whose solution is the WY
form of the product of the chunk's corrections:

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

**A decay for each channel.** g_t is then a vector of K values, exp(g_t) multiplies the rows of the state, and so d_t,
D_tj, e_j and d_C are vectors too, which come inside the sums over the channels c:

    A = beta_t sum_c k_tc D_tjc k_jc        P = scale sum_c q_tc D_tjc k_jc
    R = beta (V - (d K) S)                  O = scale (d Q) S + P U        S' = d_C S + (e K)^T U

with d, e and d_C in each element. The backward pass is, with M = scale dP and N = beta dA, which have no D,

    dU = P^T dO + (e K) dS'
    dS = d_C dS' + (d Q)^T (scale dO) - (d K)^T (beta dR)
    dQ_tc = scale d_tc (dO S^T)_tc + sum_j M_tj D_tjc k_jc
    dK_tc = e_tc (U dS'^T)_tc - beta_t d_tc (dR S^T)_tc
            + sum_i D_itc (M_it q_ic + N_it k_ic) + sum_j N_tj D_tjc k_jc
    dbeta = rows of dR . V  -  (d k) . (dR S^T)  +  rows of dA . (A / beta)

    log D:  (M_tj q_tc + N_tj k_tc) D_tjc k_jc
    log d:  scale d_tc q_tc (dO S^T)_tc - beta_t d_tc k_tc (dR S^T)_tc
    log e:  e_tc k_tc (U dS'^T)_tc                     log d_C:  d_Cc (S dS'^T)_cc

and dg_s is the same sum of these as before, in each channel. A sum over channels with D in it is a product of matrices
where D is a product of one factor of t and one of j. Between any two tokens there is a token m with D_tj = D_tm D_mj,
and neither factor is more than 1, whereas d_t / d_j overflows. So take each block of 2 s tokens, s = C / 2, .., 2, 1,
with the last token of its first half as m: each pair j < t is in the two halves of exactly one. With a = D_tm in the
second halves and b = D_mj in the first ones, which are exponentials of sums over tokens of that half alone,

    sum_c q_tc D_tjc k_jc = ((a Q) (b K)^T)_tj
    dQ += a (M (b K))        dK += b (M^T (a Q) + N^T (a K)) + a (N (b K))        where j and t are in these halves

and x = q dQ + k dK, with these parts alone, is the gradient of log a and of log b. So dg_s has the sum of x over t >= s
of the same half where that is a second one, and over j < s where it is a first one; here too nothing cancels.

**Packed sequences.** Where t and j are in different sequences D_tj is 0; d_t is 0 where t is not in the sequence that
the chunk's first state belongs to, e_j where j is not in that of the last token, and d_C where these two differ.

**Kernels.** `chunk_scores_kernel` and `chunk_inverse_kernel` make d, e, P, A and T of every chunk, the inverse in
float32 by blocks of twice the size each time, from 16 rows on as a product of three blocks, whose operands are three
products' parts where T is rounded to bfloat16; `chunk_states_kernel` goes from chunk to chunk, a program for each head
and block of V, with S in registers, and makes U, and O where these programs fill the device. Where they do not,
`chunk_outputs_kernel` makes O of all chunks at once. The backward pass repeats the first and the third, which then
stores each chunk's S and U, goes back from chunk to chunk in `chunk_states_backward_kernel`, and makes M and N + N^T of
each chunk in `chunk_scores_backward_kernel`. In `chunk_keys_backward_kernel` a program makes the gradients of q and k
for one block of channels: a loop over the blocks would hold addresses of M and N in registers, and half as many
programs would run at once. The blocks' parts of the gradients of g and beta are float32, and
`chunk_gates_backward_kernel` adds them in their order; so does `sum_heads_kernel` with those of a key head by its value
heads: no atomics. The operands of each product are rounded once to the dtype of Q; S, T, the decays and all sums are
float32. Where Q is float32 too, S and its gradient have a rest besides, what rounding took from them.

Without a correction up to 16 value heads of one key head go through a program of `chunk_scores_kernel`, which makes
Q K^T once for them, and in the backward pass M, dQ and dK are summed over as many before they are stored.

With a decay for each channel other kernels take the place of the first: `channel_decays_kernel` makes d Q, d K and e K,
so that states and outputs come of the same kernel, and `channel_blocks_kernel` and `channel_scores_kernel` make P
and A by halves: those of 8 tokens and fewer in products of blocks of 16 tokens, all of a chunk at once, and each larger
size in a program of its own. With Z, the rows of a Q in second halves and those of b K in first ones, P is in Z Z^T.
`channel_pairs_backward_kernel` takes the halves one size after the other: (M + M^T) Z has dQ in second halves and dK in
first ones. `channel_keys_backward_kernel` adds what comes through the states. The sums of log decays are products too,
of ones and of the log decays, which are in two parts beside operands of 16 bits: 2**-17 of each is lost, where rounding
an operand loses up to 2**-9.

Besides the inputs T is kept for the backward pass, and with a decay for each channel P and K K^T, which take two fifths
of its time on an H100. For each value head and 64 tokens the backward pass has in memory S, dS' and dR as operands of
products, in the dtype of Q; three or four matrices of 64 * 64; and dQ and dK in float32, these once for all value heads
that share a program. The rows of S . dS' are summed where dS' is still float32, with S as products have it: the
rounding of U and of what makes dS' is in it already, and each is as much. An initial state is in it whole. With a decay
for each channel there are d Q, d K, e K and a part of dg besides, each of as many numbers as the keys.

**The floor.** Of each value head and chunk of C = 64 tokens the products of the forward pass have, where a
multiplication and an addition count two, 2 C (K (2 C + 3 V) + 2 C V) operations: Q K^T and K K^T, K S, Q S and K^T U,
T R and P U. The backward pass has those but Q S and P U again, and 2 C (K (3 C + 6 V) + 4 C V) of its own: dU, dR and
dS, dP and dA, and those that make dQ and dK. It has to read and write the inputs, T, and the gradients of inputs and
output. For 4 x 4096 tokens with 16 key and 32 value heads of 128, in bfloat16, these are 0.09 and 0.22 trillion
operations and 0.41 and 0.74 GB. An H200 makes 800 trillion operations a second in such products, and copies 4.3 TB: no
forward pass takes it less than 0.11 ms, and no backward pass less than 0.28 ms.

What each kernel reads and writes takes the time below at 4.2 TB a second, beside what it takes on that H200, in
microseconds; of the backward pass first those of what it makes again:

    forward   l2_norm 64, 64        chunk_scores 80, 131       chunk_inverse 48, 128            chunk_states 128, 338
    backward  l2_norm 64, 65        chunk_scores 48, 98        chunk_states 159, 218
              chunk_states_backward 287, 528                   chunk_scores_backward 192, 356
              chunk_keys_backward 415, 612                     chunk_gates_backward 12, 27      sum_heads 192, 184

That is 0.32 ms of 0.66 forward and 1.4 of 2.1 backward. The walks from chunk to chunk are furthest from it: a chunk's
products wait for each other, and the 112 KiB and up to 202 registers of a program leave room for two on a
multiprocessor, half of those of this call. Triton loads only operands of products ahead, so that a walk reads beta, the
decays and, on its way back, the state before it makes a chunk's products. Wider blocks of V read queries and keys less
often but take longer, with 4 warps or 8: fewer programs hide what each waits for. A transposed state, which products
could read from registers, takes fewer trips through shared memory, but so many registers that it is slower. The
programs of `chunk_keys_backward_kernel` read dO, U and dR for each of two blocks of channels, from the second-level
cache; one of all channels needs 8 warps and takes longer. With M, dQ and dK summed over the two value heads of a key
head it takes 80 longer: the correction's matrices are in registers too. So are M and N where it makes them itself, and
both kernels of chunks in one take a sixth longer. The inverse in the program that makes A takes a tenth longer.

Without a correction it pays: for 4 x 4096 tokens with one key head of 128 and 80 value heads of 64 dQ and dK of 16
value heads each are 0.08 GB, not 1.3, which took forward and backward together from 3.6 ms to 2.5.
"""

LARGEST_KEY = 256
"""The most channels of a key or a query: a program has those of its block of the state in registers."""
LARGEST_VALUE = 512
"""The most channels of a value: programs have blocks of them, of which more need no more room; tests go as far."""
