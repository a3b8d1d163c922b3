//! [`Algorithms`]: what was advised for each kind of product.

use crate::Product;
use std::collections::HashMap;

/// The most that are kept. A program whose batches are all of other lengths asks for new ones in every step.
const MOST: usize = 1 << 14;

/// The algorithm for each kind of product, or why there is none.
pub(crate) struct Algorithms<A>(HashMap<Product, Result<A, String>>);

impl<A> Default for Algorithms<A> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<A: Clone> Algorithms<A> {
    /// The algorithm that was advised for the product, or that `ask` advises now.
    pub(crate) fn get(
        &mut self,
        product: &Product,
        ask: impl FnOnce() -> Result<A, String>,
    ) -> Result<A, String> {
        if let Some(known) = self.0.get(product) {
            return known.clone();
        }
        let advised = ask();
        self.insert(product, advised.clone());
        advised
    }

    pub(crate) fn refuse(&mut self, product: &Product, why: String) {
        self.insert(product, Err(why));
    }

    pub(crate) fn has_refused(&self, product: &Product) -> bool {
        matches!(self.0.get(product), Some(Err(_)))
    }

    fn insert(&mut self, product: &Product, algorithm: Result<A, String>) {
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.insert(*product, algorithm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Element, Matrices};

    fn product(rows: usize) -> Product {
        let side = |rows, columns| Matrices::by_rows(Element::BF16, rows, columns);
        Product::new(side(rows, 8), side(8, 8), side(rows, 8))
    }

    #[test]
    fn each_kind_is_asked_for_once_while_it_is_kept() {
        let mut algorithms = Algorithms::default();
        for rows in 0..MOST {
            assert_eq!(algorithms.get(&product(rows), || Ok(rows)), Ok(rows));
        }
        let not_asked = || panic!("this is known");
        assert_eq!(algorithms.get(&product(3), not_asked), Ok(3));
        assert_eq!(algorithms.get(&product(MOST), || Ok(5)), Ok(5));
        assert_eq!(algorithms.get(&product(MOST), not_asked), Ok(5));
        assert!(algorithms.0.len() <= MOST);
        assert_eq!(algorithms.get(&product(3), || Ok(7)), Ok(7));
    }

    #[test]
    fn a_refusal_is_kept_too() {
        let mut algorithms = Algorithms::default();
        let [asked, failed, fine] = [1, 2, 3].map(product);
        let refused = algorithms.get(&asked, || Err::<usize, _>("none".into()));
        assert_eq!(refused, Err("none".into()));
        algorithms.get(&failed, || Ok(0)).unwrap();
        algorithms.refuse(&failed, "it failed".into());
        algorithms.get(&fine, || Ok(0)).unwrap();
        let refused = [asked, failed, fine].map(|product| algorithms.has_refused(&product));
        assert_eq!(refused, [true, true, false]);
    }
}
