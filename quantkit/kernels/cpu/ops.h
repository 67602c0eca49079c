/* Operations of ops.c on one row of a step, for callers inside a parallel region. type: QK_F32 or QK_BF16. Outputs may
   replace inputs. */
#pragma once
#include "quantkit.h"

void qk_norm_row(const void *x, const void *weight, void *out, int64_t width, int type, float eps, float offset);

/* total = x + residual; normed = norm of total. */
void qk_add_norm_row(const void *x, const void *residual, const void *weight, void *normed, void *total, int64_t width,
                     int type, float eps, float offset);

/* x += added, in some columns of a row; columns.first is a multiple of 16. */
void qk_add_row(void *x, const void *added, QkRange columns, int type);

/* Rotate channel i with channel i + half. */
void qk_rotate_head(void *states, const float *cos, const float *sin, int64_t half, int type);

/* Compute some columns of a row; columns.first is a multiple of 16. gate_up: 2 x width, gate first. */
void qk_gate_row(const void *gate_up, void *out, int64_t width, QkRange columns, int kind, int type);
