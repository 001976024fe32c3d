//! A region's secret, the token: a client that knows it may use the region.
//!
//! The client draws the token and sends it once, when it creates the region. Later connections
//! prove that they know it, over the server's nonce for that very connection. So a recorded proof
//! is useless. The transport keeps the token secret on the way (TLS, or loopback).

use crate::wire::TOKEN_BYTES;
use crate::wire::hello::NONCE_BYTES;
use crate::wire::request::Token;
use ring::hmac;

/// The statement that a proof covers.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    /// The server's nonce, from its hello on this connection.
    pub nonce: [u8; NONCE_BYTES],
    /// The server's epoch, from its hello.
    pub epoch: u64,
    /// The region that the client asks to use.
    pub region: u32,
    /// True to void earlier leases.
    pub fence: bool,
}

impl Claim {
    fn bytes(&self) -> [u8; NONCE_BYTES + 13] {
        let mut bytes = [0; NONCE_BYTES + 13];
        bytes[..NONCE_BYTES].copy_from_slice(&self.nonce);
        bytes[NONCE_BYTES..NONCE_BYTES + 8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[NONCE_BYTES + 8..NONCE_BYTES + 12].copy_from_slice(&self.region.to_le_bytes());
        bytes[NONCE_BYTES + 12] = self.fence as u8;
        bytes
    }
}

/// Returns the proof that the author of the claim knows the token (HMAC-SHA256).
pub fn proof(token: &Token, claim: &Claim) -> Token {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, token), &claim.bytes());
    let mut proof = [0; TOKEN_BYTES];
    proof.copy_from_slice(tag.as_ref());
    proof
}

/// Returns true if the proof holds. Takes the same time whatever is wrong with the proof.
pub fn proves(token: &Token, claim: &Claim, proof: &Token) -> bool {
    let key = hmac::Key::new(hmac::HMAC_SHA256, token);
    hmac::verify(&key, &claim.bytes(), proof).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    #[test]
    fn a_proof_is_good_for_one_claim() {
        let token: Token = random::bytes().unwrap();
        let claim = Claim { nonce: random::bytes().unwrap(), epoch: 1, region: 7, fence: false };
        let good = proof(&token, &claim);
        assert!(proves(&token, &claim, &good));
        assert!(!proves(&random::bytes().unwrap(), &claim, &good));
        for other in [
            Claim { nonce: random::bytes().unwrap(), ..claim },
            Claim { epoch: 2, ..claim },
            Claim { region: 8, ..claim },
            Claim { fence: true, ..claim },
        ] {
            assert!(!proves(&token, &other, &good));
        }
    }
}
