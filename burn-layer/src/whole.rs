//! [`ops_come_whole`]: whether Burn's client sends ops as the program calls them.

use burn::backend::Remote;
use std::sync::Once;

/// Whether every op reaches the layers as the program calls it. With Burn's own feature `fusion`, which its default features enable
/// together with `vision`, `linalg` and `signal`, some reach them as several smaller ops, because Burn's client has no other way
/// to collect them: activation functions, softmaxes, norms, embeddings, `neg`, and gradients of transposed
/// convolutions, among others. Programs run all the same. But parts cost a rounding in 16 bits (`gelu`), and burn-amp's
/// `full_precision` does not reach the gradients of transposed convolutions' filters.
///
/// ```
/// use burn::tensor::{Device, Tensor, activation};
/// use burn_layer::{Inputs, Layer, Layers, Op, Plan, ops_come_whole};
/// use std::sync::{Arc, Mutex};
///
/// #[derive(Clone, Debug, Default)]
/// struct Seen(Arc<Mutex<Vec<Op>>>);
///
/// impl Layer for Seen {
///     fn plan(&self, op: Op, _inputs: &Inputs) -> Option<Plan> {
///         self.0.lock().unwrap().push(op);
///         None
///     }
/// }
///
/// let seen = Seen::default();
/// let device = Layers::on(Device::flex()).layer(seen.clone()).serve()?;
/// activation::gelu(Tensor::<1>::ones([4], &device)).into_data();
/// assert_eq!(seen.0.lock().unwrap().contains(&Op::gelu), ops_come_whole());
/// # Ok::<(), burn_layer::LayerError>(())
/// ```
pub fn ops_come_whole() -> bool {
    !std::any::type_name::<Remote>().contains("Fusion")
}

/// Tells once, in the log, if they do not.
pub(crate) fn tell() {
    static ONCE: Once = Once::new();
    if !ops_come_whole() {
        ONCE.call_once(|| {
            log::warn!(
                "burn-layer: Burn's own feature `fusion` is enabled (its default features do that together with `vision`, \
                 `linalg` or `signal`), so some ops, such as `relu`, reach layers in parts, which take more memory in mixed \
                 precision. If the program uses none of these three, set `default-features = false` on `burn` with the list in the \
                 README's Install, and enable `fusion` of burn-amp, burn-ddp or burn-layer. If it uses one on a GPU, leave all as it is: \
                 it does not compile otherwise"
            );
        });
    }
}
