//! Rows of a packed matrix as f32: an embedding table that is also the output projection is kept once.

use super::pack::Matrix;
use super::pool::Pool;

/// `out[r] = table[ids[r]] · scale`; `out` is `(ids, inputs)`.
///
/// # Panics
/// When an id is not an output of `table`, or the lengths differ.
pub fn embed(pool: &mut Pool, out: &mut [f32], table: &Matrix, ids: &[u32], scale: f32) {
    assert_eq!(out.len(), ids.len() * table.inputs());
    pool.run_pieces(out, table.inputs(), &|r, out| {
        table.row(ids[r] as usize, out);
        if scale != 1.0 {
            out.iter_mut().for_each(|x| *x *= scale);
        }
    });
}
