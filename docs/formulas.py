"""The formula of each operator, as its page shows it at the top; its file's docstring says how it is computed."""

FORMULAS = {
    "add": r"y = a + b",
    "add_rms_norm": r"h = x + r, \qquad "
    r"y_i = \frac{h_i}{\sqrt{\frac1N \sum_j h_j^2 + \varepsilon}}\,(w_i + \mathrm{offset})",
    "rms_norm": r"y_i = \frac{x_i}{\sqrt{\frac1N \sum_j x_j^2 + \varepsilon}}\,(w_i + \mathrm{offset})",
    "layer_norm": r"y_i = \frac{x_i - \mu}{\sqrt{\sigma^2 + \varepsilon}}\,w_i + b_i",
    "group_norm": r"y = \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \varepsilon}}\,w_c + b_c",
    "softmax": r"y_i = \frac{e^{x_i}}{\sum_j e^{x_j}}",
    "sparsemax": r"y_i = \max(x_i - \tau, 0), \qquad \textstyle\sum_i y_i = 1",
    "attention_residual": r"y = \sum_i a_i\, v_i, \qquad a = \mathrm{softmax}_i\left("
    r"\frac{\sum_h q_h w_h v_{ih}}{\sqrt{\frac1H \sum_h v_{ih}^2 + \varepsilon}}\right)",
    "sinkhorn": r"y = u\,(p + \varepsilon)\,v, \qquad p_{ij} = \frac{e^{x_{ij}}}{\sum_k e^{x_{ik}}}, \qquad "
    r"\textstyle\sum_i y_{ij} = 1, \quad \sum_j y_{ij} \approx 1",
    "rms_linear": r"y = W\,\frac{x}{\sqrt{\frac1K \sum_k x_k^2 + \varepsilon}}",
    "read_streams": r"y = \sum_i p_i\, x_i",
    "write_streams": r"y_j = q_j\, f + \sum_i C_{ij}\, x_i",
    "swiglu": r"y = \mathrm{silu}(g)\,u = \frac{g\,u}{1 + e^{-g}}",
    "geglu": r"y = \mathrm{gelu}(g)\,u",
    "relu_squared": r"y = \max(x, 0)^2",
    "rms_norm_gated": r"y = \frac{x}{\mathrm{rms}(x)}\,w\,f(g), \qquad f = \mathrm{silu} \text{ or } \sigma",
    "causal_conv1d": r"y_t = f\left(b + \sum_{k=1}^{K} w_k\, x_{t-K+k}\right), \qquad f = \mathrm{silu} \text{ or } 1",
    "causal_conv1d_step": r"y = f\left(b + \sum_{k=1}^{K} w_k\, x_k\right), \qquad "
    r"f = \mathrm{silu} \text{ or } 1",
    "poly_norm": r"y = b + \sum_{k=1}^{3} \frac{w_k\, x^{4-k}}{\mathrm{rms}(x^{4-k})}",
    "dyt": r"y_i = w_i \tanh(\alpha x_i) + b_i",
    "linear_act": r"y = f(x W^\top + b)",
    "gated_linear": r"y = (f(g) \odot u)\, W^\top + b, \qquad f = \mathrm{silu} \text{ or } \mathrm{gelu}",
    "rms_norm_linear": r"y_i = W_i\, h, \qquad h = \frac{x}{\sqrt{\frac1K \sum_k x_k^2 + \varepsilon}}"
    r"\,(w + \mathrm{offset})",
    "gated_delta_rule": r"S_t = D_t + \beta_t\, k_t \left(v_t - D_t^\top k_t\right)^\top, \qquad "
    r"D_t = e^{g_t} S_{t-1} \text{ or } \mathrm{diag}(e^{g_t})\, S_{t-1}, \qquad o_t = s\, S_t^\top q_t",
    "gated_linear_attention": r"S_t = e^{g_t} S_{t-1} + k_t v_t^\top \text{ or } "
    r"\mathrm{diag}(e^{g_t})\, S_{t-1} + k_t v_t^\top, \qquad o_t = s\, S_t^\top q_t",
    "gated_delta_rule_step": r"S' = D + \beta\, k \left(v - D^\top k\right)^\top, \qquad "
    r"D = e^{g} S \text{ or } \mathrm{diag}(e^{g})\, S, \qquad o = s\, S'^\top q",
    "gated_linear_attention_step": r"S' = e^{g} S + k v^\top \text{ or } "
    r"\mathrm{diag}(e^{g})\, S + k v^\top, \qquad o = s\, S'^\top q",
    "rope": r"y = x \cos\theta + \mathrm{rotate}(x) \sin\theta",
    "qk_norm_rope": r"n = \mathrm{rmsnorm}(x)\,w, \qquad y = n \cos\theta + \mathrm{rotate}(n) \sin\theta",
    "cross_entropy": r"\ell = \log \sum_v e^{x_v} - x_t",
    "ce_tvd": r"\ell = \log \sum_v e^{x_v} - x_t, \qquad d = \tfrac12 \sum_v |q_v - p_v|",
    "fused_linear_ce": r"\ell = \log \sum_v e^{z_v} - z_t, \qquad z = W x + b",
    "fused_linear_ce_metrics": r"\ell = \log \sum_v e^{z_v} - z_t, \qquad "
    r"H = -\sum_v p_v \log\, p_v, \qquad z = W x + b",
    "vocab_parallel_linear_ce": r"\ell = \log \sum_{\mathrm{ranks}} \sum_v e^{z_v} - z_t, \qquad z = W x + b",
    "linear_logprobs": r"\log\, p_t = z_t - \log \sum_v e^{z_v}, \qquad H = -\sum_v p_v \log\, p_v, \qquad z = W x + b",
    "linear_topk": r"\log\, p_{j_k} = z_{j_k} - \log \sum_v e^{z_v}, \qquad j = \mathrm{topk}(z), \qquad z = W x + b",
    "info_nce": r"\ell = -\frac1N \sum_i \log \frac{e^{q_i \cdot k_i / \tau}}{\sum_j e^{q_i \cdot k_j / \tau}}",
    "maxsim": r"s_{qn} = \sum_{t \in q} \max_{s \in n} q_t \cdot d_s",
    "splade_head": r"y_v = \max_s \log(1 + \max(z_{sv}, 0)), \qquad z_s = W x_s + b",
    "fused_linear_jsd": r"\ell = \beta\,\mathrm{KL}(P \parallel M) + (1 - \beta)\,\mathrm{KL}(Q \parallel M), "
    r"\qquad M = \beta P + (1 - \beta) Q",
    "fused_linear_jsd_ce": r"\ell = \beta\,\mathrm{KL}(P \parallel M) + (1 - \beta)\,\mathrm{KL}(Q \parallel M) "
    r"- \lambda \log\, q_t, \qquad M = \beta P + (1 - \beta) Q",
    "fused_linear_distill": r"\ell = \sum_d a_d \left( \beta\,\mathrm{KL}(P_d \parallel M_d) "
    r"+ (1 - \beta)\,\mathrm{KL}(Q \parallel M_d) \right) - \lambda \log\, q_t, \qquad M_d = \beta P_d + (1 - \beta) Q",
    "fused_linear_policy": r"\ell = \sum_t w_t\, f(\log\, p_t, r_t, A_t) + k_t\, \mathrm{KL}_t - h_t H_t, \qquad "
    r"r_t = e^{\log\, p_t - \log\, \pi_t}",
    "fused_linear_preference": r"\ell = \sum_g u_g\, f(s_{g1}, s_{g2}), \qquad "
    r"s_{gm} = \sum_t \log\, p_{gmt} - \log\, \pi_{gm}",
    "moe_experts": r"y_t = \sum_k w_{tk}\, D_{e}\,(\mathrm{silu}(G_{e}\, x_t) \odot U_{e}\, x_t), \qquad e = e_{tk}",
    "embedding": r"y_n = W_{i_n}",
    "router_topk": r"w_k = \frac{s_{e_k}}{\sum_j s_{e_j}}, \qquad e = \mathrm{topk}(s + b), \qquad "
    r"s = \mathrm{softmax}(x)",
    "router_topk_sums": r"c_e = \sum_t [e \in e_t], \qquad P_e = \sum_t p_{te}, \qquad "
    r"Z = \sum_t \left(\log \sum_e e^{x_{te}}\right)^2",
    "grouped_linear": r"y_r = W_e\, x_r + b_e",
    "moe_permute": r"y_r = x_{\lfloor p_r / K \rfloor}, \qquad p = \mathrm{argsort}(e)",
    "moe_unpermute": r"y_t = \sum_k w_{tk}\, x_{p_{tk}}",
    "jsd": r"\ell = \beta\,\mathrm{KL}(P \parallel M) + (1 - \beta)\,\mathrm{KL}(Q \parallel M), "
    r"\qquad M = \beta P + (1 - \beta) Q",
    "kl_div": r"\ell = t\,(\log t - x)",
    "tvd": r"\ell = \frac12 \sum_v \left| p_v - q_v \right|",
    "giou_loss": r"\ell = 1 - \frac{I}{U} + \frac{C - U}{C}",
}
