//! [`Fp8Filter`]: which linear layers run in fp8.

use serde::{Deserialize, Serialize};
use std::num::NonZeroUsize;

/// Selects the linear layers that [`Autocast::fp8`](crate::Autocast::fp8) runs in fp8. The others run as the policy says.
///
/// By default, these are the layers whose numbers of inputs and outputs are multiples of 16, which is what fp8 hardware
/// multiplies (torchao's rule). This leaves out the usual last layer with ten outputs for ten classes. To leave out more:
///
/// | leave out | with |
/// |---|---|
/// | small layers, which gain nothing | [`min_size`](Self::min_size), [`except_up_to`](Self::except_up_to) |
/// | the first or last layer, by its sizes | [`except_size`](Self::except_size) |
/// | a layer or block by name | [`except_name`](Self::except_name) and [`named`](crate::named) |
/// | a part of the program | [`autocast(&Policy::bf16(), ..)`](crate::autocast), [`full_precision`](crate::full_precision) |
///
/// ```
/// use burn_amp::{Autocast, Fp8Filter, recipe::CurrentScaling};
///
/// let filter = Fp8Filter::new().min_size([64, 64]).except_size([768, 50_304]).except_name("head");
/// let autocast = Autocast::fp8(CurrentScaling::new())?.fp8_filter(filter);
/// # Ok::<(), burn_amp::Fp8Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[must_use = "a filter does nothing until autocast has it"]
pub struct Fp8Filter {
    multiple_of: NonZeroUsize,
    min_size: [usize; 2],
    except_up_to: Vec<[usize; 2]>,
    except_sizes: Vec<[usize; 2]>,
    except_names: Vec<String>,
}

impl Fp8Filter {
    /// The filter that takes all layers whose sizes are multiples of 16.
    pub fn new() -> Self {
        Self {
            multiple_of: const { NonZeroUsize::new(16).unwrap() },
            min_size: [1, 1],
            except_up_to: Vec::new(),
            except_sizes: Vec::new(),
            except_names: Vec::new(),
        }
    }

    /// Only layers whose numbers of inputs and outputs are multiples of `multiple_of`; 1 takes all.
    ///
    /// # Panics
    ///
    /// When `multiple_of` is 0.
    pub fn multiple_of(mut self, multiple_of: usize) -> Self {
        self.multiple_of =
            NonZeroUsize::new(multiple_of).expect("no size is a multiple of 0; 1 takes all layers");
        self
    }

    /// Only layers with at least so many inputs and at least so many outputs.
    pub fn min_size(mut self, [inputs, outputs]: [usize; 2]) -> Self {
        self.min_size = [inputs, outputs];
        self
    }

    /// No layers with at most so many inputs and at most so many outputs. `except_up_to([4096, 1024])` is what torchao's filter
    /// for tensorwise scaling leaves out. Call it again for further rules.
    pub fn except_up_to(mut self, [inputs, outputs]: [usize; 2]) -> Self {
        self.except_up_to.push([inputs, outputs]);
        self
    }

    /// No layers with exactly so many inputs and outputs.
    pub fn except_size(mut self, [inputs, outputs]: [usize; 2]) -> Self {
        self.except_sizes.push([inputs, outputs]);
        self
    }

    /// No layers in a block with this [name](crate::named).
    pub fn except_name(mut self, name: impl Into<String>) -> Self {
        self.except_names.push(name.into());
        self
    }

    /// Whether a layer with these numbers of inputs and outputs, in blocks with these names, runs in fp8.
    pub fn takes<'a>(&self, size: [usize; 2], names: impl IntoIterator<Item = &'a str>) -> bool {
        let fits = |(size, min): (&usize, &usize)| {
            size.is_multiple_of(self.multiple_of.get()) && size >= min
        };
        let small = |[inputs, outputs]: &[usize; 2]| size[0] <= *inputs && size[1] <= *outputs;
        size.iter().zip(&self.min_size).all(fits)
            && !self.except_up_to.iter().any(small)
            && !self.except_sizes.contains(&size)
            && !names
                .into_iter()
                .any(|name| self.except_names.iter().any(|except| except == name))
    }
}

impl Default for Fp8Filter {
    fn default() -> Self {
        Self::new()
    }
}
